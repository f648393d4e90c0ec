"""Settings of all tests: no access to model hubs, and Ctrl-C raises KeyboardInterrupt."""

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore Ctrl-C in background jobs and their children
