"""A cluster in virtual time: a whole job in one process, whose messages take computed time."""
