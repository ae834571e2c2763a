"""A simulated cluster in virtual time around the real core.

One seed stands for one whole history: the job, its nodes, the network's delays and every fault. Invariants are checked
after every event, so a seed that breaks one can be replayed exactly (`python -m resile.sim --seed N`). Only the core is
real here. The master around it, the agents, the platform and the network are models of the production ones.
"""
