"""A Ray Serve application of edgeinfer endpoints: a deployment per model, which Ray scales."""
