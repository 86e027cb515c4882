"""Measurements behind `segue bench`: each file answers one question about one model, as rows of plain values.

Arms of one table are measured in one process, in turn, and reported as medians with their spread: machines differ from
hour to hour, ratios within one run less.
"""
