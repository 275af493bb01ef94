"""A worker that joins nothing and ignores SIGTERM."""
import signal
import time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("hanging", flush=True)
time.sleep(600)
