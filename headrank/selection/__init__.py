"""Which heads are read: statistics over judged lists and the policies that rank heads by them."""
