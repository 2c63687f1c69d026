"""What happens between two optimiser steps, in the order in which `fit.py` lists it.

Throughput stops its clock and reads the device once per log interval; TrainingMetrics and Validation add to the same
row; MetricsWriter writes it; Progress shows it; Checkpoint saves; Signals may end the run; GarbageCollection keeps
Python's collector to log points. Validation is a callback and not Lightning's own loop, because that one runs after
every callback: a checkpoint of the same step would come too early or in the middle of it.
"""
