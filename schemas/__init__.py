"""The contract: what travels, on which topic, behind which port. Imports nothing of ours."""
