"""What `conv2d_ext.certify` consists of; nothing here is public.

Dependencies run down this list:

- command: the command line, `python -m conv2d_ext certify`
- axes: which runs are compared, and what was found
- runs: the model's runs, and its state kept
- locate: two recordings compared; the first call that varies
- record: what a run calls, with the bits of every tensor that goes in and comes out
- names: the functions of torch that a model calls
- calls: the number and the module of each call, and facts about ops
- leaves: the tensors of an output, and the example's part of a batch
- report, against, result: what was found, as text, held against another's, as data
- bits: bit patterns, their digests and distances
"""
