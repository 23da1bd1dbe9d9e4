"""Measures a group and a model for some seconds, and says what to use: ``python -m dltrain_ext.advise``, by torchrun.

The modules: ``workload`` has the model, its buckets and the times of its steps. ``prediction`` has the time of a step
with each codec, and which to use. ``session`` runs both on every rank, and prints the table.
"""
