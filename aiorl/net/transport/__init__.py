"""Transport of frames: endpoints over ZeroMQ, and admission of peers."""
