"""The rig as the backend sees it: rig spec, blendshapes, default head, landmark embedding."""
