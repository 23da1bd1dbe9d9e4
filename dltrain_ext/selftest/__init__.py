"""Whether this installation is right on this machine, or cluster: ``python -m dltrain_ext.selftest``, also by torchrun.

The rooms: ``session`` is one run of all checks on every rank. ``checks`` is what holds on a device by itself,
``together`` what holds among ranks, ``links`` what their links carry, and ``faults`` what they say of one that dies.
``sums`` is what ranks contribute to a sum, and how a result is judged; ``ranks`` starts and connects them; ``report``
is the table and the JSON.
"""
