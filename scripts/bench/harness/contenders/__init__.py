"""Contenders, one a file: `<name>(task: Task) -> Contender`, each as its own users would write it."""
