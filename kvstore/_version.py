"""The version of odsgd: that of both packages, which are installed together."""
VERSION = "0.3.0"
