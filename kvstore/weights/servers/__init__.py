"""The server role: what one server owns, and how it takes messages, in MXNet's loop or on sockets."""
