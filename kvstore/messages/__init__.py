"""What an algorithm may ask of the wire, and what travels on it. No MXNet, no sockets."""
