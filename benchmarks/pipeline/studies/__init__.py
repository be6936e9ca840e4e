"""What is only computed: the paper's comparison, sweeps, and rankers that err."""
