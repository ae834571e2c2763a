"""The master of one job: listens to agents, keeps the journal, tells the time and executes decisions on a platform.

The master decides nothing by itself; `core` does. It adds one ordered queue of events, a journal that has every event
before its decisions are executed, and the connections and the platform that execute them.
"""
