"""What holds for all tests: no test asks a model hub for anything."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported
