"""The closed form: bytes of every storage of a step as products of sizes, fitted to recorded steps and evaluated."""
