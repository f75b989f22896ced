"""The first day on AWS: a step for each thing that the kit does there, cheapest first, and what AWS answered."""
