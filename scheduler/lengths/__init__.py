"""How many nodes a draft should have, by measurement."""
