"""Checks this installation on this machine or cluster: ``python -m dltrain_ext.selftest``, also with torchrun.

The modules: ``session`` runs all checks on every rank. ``checks`` has the checks of a single device, ``together`` those
of several ranks, ``links`` measures the links between ranks, and ``faults`` checks what ranks report when one is
killed. ``sums`` makes contributions with known sums, and compares results with them. ``ranks`` starts and connects the
ranks, and ``command`` calls something on each. ``report`` writes the table and the JSON.
"""
