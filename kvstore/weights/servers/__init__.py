"""The server role: what one server owns, and its place in MXNet's loop."""
