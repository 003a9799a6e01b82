"""Keys that algorithms of one kind share: of fragments in `actor_critic`, of a replay in `replay`.

An algorithm's own keys are in its module. Importing these does not load TensorFlow.
"""
