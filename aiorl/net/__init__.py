"""The network: what is said (wire), what may be said when (protocol), and the sockets (transport)."""
