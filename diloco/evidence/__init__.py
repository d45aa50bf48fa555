"""`diloco evidence`: the claims of the papers and of this project, tried with small learners in simulated time."""
