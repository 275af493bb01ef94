"""A method's calls to the holder of the global weights, and the messages between them. No MXNet, no sockets."""
