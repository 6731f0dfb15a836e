"""Random cases through torch: `python -m tests.torch_fuzz --help`.

A case is plain data, drawn from a seed and an index alone (cases.py); properties.py has what holds
for calls of the ops, errors.py for arguments that are wrong, compositions.py for what PyTorch wraps
around a call, modules.py for layers. runner.py runs them in a child process, so that a crash is a
finding, and makes what fails small.

Why not Hypothesis, which test_properties.py uses: a crash ends the process that holds the choices
that led there, and what it draws costs more than the convolutions. Here a case is known by its
index before it runs, and is simplified as data.
"""
