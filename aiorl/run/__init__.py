"""The learner: takes fragments in, trains, gives weights out."""
