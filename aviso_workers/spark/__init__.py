"""The Spark wing: Spark jobs as notifications.

Importing this package needs no pyspark, so that the event log of a Spark somewhere else can be followed without one.
"""
