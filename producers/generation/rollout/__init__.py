"""One completion: from prompt tokens to a scored trajectory; knows nothing of topics it does not write."""
