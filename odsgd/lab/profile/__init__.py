"""``odsgd profile``: measure what the description of a virtual cluster needs to know, and write it.

    passes      how long the layers of the user's own network take, forward and backward, and how that varies
    processor   what a worker's and a server's processor take for the floats of a bucket
    wire        in a job under ``odsgd launch``: links, and what a message costs at both of its ends
"""
