"""``distribai demo``: a whole grid on one machine, from the product's own commands.

The demo starts the same processes that a person would start in separate terminals, talks to them
through the client, and ends them. There is no demo mode anywhere behind it.
"""
