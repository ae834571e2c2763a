"""A simulated cluster in virtual time around the real core.

One seed names one whole history: the job, its nodes, the network's moods and every fault. Invariants are checked after
every event, so a seed that breaks one is a short, exact, repeatable story (`python -m resile.sim --seed N`).
What is real here is the core; the shell, the agents, the platform and the network are models of the production ones.
"""
