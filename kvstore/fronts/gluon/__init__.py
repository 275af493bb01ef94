"""The front end for Gluon: a store for gluon.Trainer, and the way between devices and flat arrays."""
