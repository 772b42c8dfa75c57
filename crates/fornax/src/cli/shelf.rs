//! `fornax list --available`: models of the hub by short names, beside what this machine can do.

use std::io::{self, Write};

use fornax::hub::shelf::{self, Known};
use fornax::machine;
use fornax::units::{binary, bytes};
use fornax::{Device, hub};
use serde::Serialize;
use serde_json::json;

use super::{device, locate, output, speed};

/// What a machine can do with a model.
#[derive(Debug, Serialize)]
struct Offer {
    name: &'static str,
    aliases: &'static [&'static str],
    description: &'static str,
    reference: &'static str,
    purpose: &'static str,
    licence: &'static str,
    /// As published; the file itself was not read for this list.
    bytes: u64,
    /// About, with 8192 tokens of context.
    memory_bytes: u64,
    /// Whether that is free here; absent where the device does not say.
    fits: Option<bool>,
    /// At most: what is read for a token against what the memory gives in a second.
    tokens_per_second_max: Option<f64>,
    on_disk: bool,
}

impl Offer {
    fn of(known: &'static Known, here: &Here, on_disk: bool) -> Offer {
        let talks = matches!(known.purpose, shelf::Purpose::Chat | shelf::Purpose::Code);
        let fits = here.free.map(|free| known.memory_bytes() <= free);
        let rate = here.rate.filter(|_| talks && fits != Some(false));
        Offer {
            name: known.name,
            aliases: known.aliases,
            description: known.description,
            reference: known.reference,
            purpose: known.purpose.name(),
            licence: known.licence,
            bytes: known.bytes,
            memory_bytes: known.memory_bytes(),
            fits,
            tokens_per_second_max: rate.map(|rate| rate / known.read_bytes as f64),
            on_disk,
        }
    }

    fn line(&self) -> String {
        let fits = match self.fits {
            Some(true) => "fits",
            Some(false) => "too large",
            None => "?",
        };
        let rate = self.tokens_per_second_max.map_or(String::new(), |rate| format!("<{rate:.0} tok/s"));
        format!(
            "{:<21} {:<6} {:>9} {:>9}  {fits:<9} {rate:>12}  {:<19}  {}{}",
            self.name,
            self.purpose,
            bytes(self.bytes),
            binary(self.memory_bytes),
            self.licence,
            self.description,
            if self.on_disk { ", on disk" } else { "" }
        )
    }
}

/// What models find here.
struct Here {
    device: Device,
    free: Option<u64>,
    /// Bytes that are read in a second.
    rate: Option<f64>,
}

impl Here {
    fn look() -> Here {
        let device = device::auto().0;
        let free = match device {
            Device::Cpu => machine::memory_available(),
            _ => device.free_bytes().ok().flatten(),
        };
        Here { device, free, rate: speed::bytes_per_second(device) }
    }
}

pub(crate) fn list(as_json: bool) -> anyhow::Result<()> {
    let here = Here::look();
    let hub = locate::hub().ok();
    let on_disk = |known: &Known| {
        let reference = hub::Reference::parse(known.reference).ok();
        hub.as_ref().zip(reference).is_some_and(|(hub, reference)| hub.local(&reference).is_some())
    };
    let offers: Vec<Offer> =
        shelf::KNOWN.iter().map(|known| Offer::of(known, &here, on_disk(known))).collect();
    if as_json {
        return output::json(&json!({
            "device": here.device.to_string(),
            "free_bytes": here.free,
            "bytes_per_second": here.rate,
            "context": shelf::CONTEXT,
            "models": offers,
        }));
    }
    let mut out = io::stdout().lock();
    writeln!(
        out,
        "{:<21} {:<6} {:>9} {:>9}  {:<9} {:>12}  {:<19}",
        "name", "for", "download", "memory", "here", "speed", "licence"
    )?;
    for offer in &offers {
        writeln!(out, "{}", offer.line())?;
    }
    let free = here.free.map_or("an unknown amount".to_owned(), binary);
    let rate = here.rate.map_or("unknown".to_owned(), |rate| format!("{:.1} GB/s", rate / 1e9));
    writeln!(out, "\n{}: {free} free, memory read at {rate} just now.", here.device)?;
    writeln!(
        out,
        "Sizes are as published, memory is about what {} tokens of context take, speeds are upper bounds. `fornax plan \
         NAME` reads the real headers; a fetch is held to the hub's checksum.",
        shelf::CONTEXT
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_says_whether_it_fits_and_how_fast_it_may_be() {
        let known = shelf::find("qwen3:4b").unwrap();
        let offer = |free: Option<u64>| {
            let here = Here { device: Device::Cpu, free, rate: Some(known.read_bytes as f64 * 10.0) };
            Offer::of(known, &here, false)
        };
        let fits = offer(Some(known.memory_bytes()));
        assert!(fits.line().contains("fits") && fits.line().contains("<10 tok/s"), "{}", fits.line());
        let large = offer(Some(known.memory_bytes() - 1));
        assert!(large.line().contains("too large") && !large.line().contains("tok/s"), "{}", large.line());
        assert_eq!(offer(None).fits, None);
        // What makes no tokens has no tokens a second.
        let here = Here { device: Device::Cpu, free: None, rate: Some(1e9) };
        assert_eq!(Offer::of(shelf::find("bge-small").unwrap(), &here, false).tokens_per_second_max, None);
    }
}
