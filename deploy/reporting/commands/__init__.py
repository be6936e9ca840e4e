"""`streamrl report`: which runs are meant, and where the page goes."""
