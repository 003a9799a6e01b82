"""The thin shell that moves frames: endpoints over ZeroMQ, and who may connect."""
