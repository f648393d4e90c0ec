"""What holds for all tests: no test asks a model hub for anything."""

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a script's background ignores Ctrl-C, and its children do, too
