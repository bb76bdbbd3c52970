"""Local SGD and DiLoCo: replicas of a model train by themselves, and meet every so many steps."""
