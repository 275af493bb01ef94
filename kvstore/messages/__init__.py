"""What an algorithm may ask of what holds the global weights, and what travels between them. No MXNet, no sockets."""
