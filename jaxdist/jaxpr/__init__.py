"""Reading traced programs (jaxprs): evaluation with changes, axes of collectives, counts of branches."""
