"""The CPU engine without torch: plans of any size, and bugs that the fuzzer has to catch."""
