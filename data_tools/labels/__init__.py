"""Labels: grades and scores of a collection's candidates, from judgements, from a teacher's run, or from both."""
