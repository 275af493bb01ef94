"""A worker that joins nothing, and does no more on SIGTERM than say so."""
import signal
import time

signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
print("hanging", flush=True)
time.sleep(600)
