"""Memory of a device in closed form: what it holds, and the most at any time of a step."""
