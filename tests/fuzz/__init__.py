"""The fuzzer of the CPU engine: `python tests/fuzz --help`."""
