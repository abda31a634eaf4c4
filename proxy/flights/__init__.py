"""The requests on their way: the state machine of each, its siblings, its ids and its lifetime."""
