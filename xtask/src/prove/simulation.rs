//! Many lives of an engine over the fake runner: nothing lost, every token right, every page back.

use anyhow::{Context, Result};

use super::Facts;
use crate::{command, output};

const LIVES: &str = "20000";

pub(super) fn run() -> Result<Facts> {
    let args =
        ["run", "--quiet", "--profile", "checked", "--package", "fornax-engine", "--example", "simulate"];
    let printed = output(command("cargo", &args).args(["--", LIVES]))?;
    let counts = printed.lines().last().context("the simulation printed nothing")?;
    Ok(vec![("seeds", format!("0 to {LIVES}, 100 requests each")), ("counts", counts.to_owned())])
}
