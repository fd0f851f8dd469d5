"""For all tests."""

import signal

# A suite that was started in the background of a shell would ignore Ctrl-C, and so would every process it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
