"""Where nodes run: one interface (`base.Platform`), one adapter for each place."""
