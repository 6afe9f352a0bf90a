"""What one sweep needs: visits, perturbation, the work buffer, activations, micro-batches."""
