"""Publishing a cut: what is here and what is published make a plan; the plan is carried out as one commit.

``cut.py`` reads the cut and what is mirrored, ``limits.py`` refuses what the host will not take, ``plan.py`` is pure, ``hub.py`` is the one
gateway to the hub (``transport.py`` its patience, ``policy.py`` its numbers), ``journal.py`` remembers uploads, ``execute.py`` does it.
"""
