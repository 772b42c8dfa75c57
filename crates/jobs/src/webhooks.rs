//! Tells those who wait how their jobs ended: from a durable outbox, signed, to hosts that the operator allows.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use fornax_code::Code;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use tokio::{sync::watch, task::JoinSet};
use ureq::{
    Agent,
    config::Config,
    http::Uri,
    unversioned::{
        resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver},
        transport::{DefaultConnector, NextTimeout},
    },
};

use crate::{Failure, Store, store::Delivery};

/// Who may be told, and how they know that it is us.
#[derive(Clone, Debug, Default)]
pub struct WebhookOptions {
    /// Hosts that may be called, as `hooks.example`; nobody else is.
    pub hosts: Vec<String>,
    /// Whether those may be on this machine or in a private network.
    pub allow_private: bool,
    /// Signs what is sent.
    pub secret: Vec<u8>,
}

/// How often a webhook is tried: with the pauses below, for some two hours.
const ATTEMPTS_MAX: i64 = 8;

/// Whoever takes longer to answer is tried again.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The pause after the first try, and how it grows.
const PAUSE: Duration = Duration::from_secs(5);
const PAUSE_FACTOR: u32 = 3;

/// Sent at once: a host that is slow to answer does not hold up the others.
const TOGETHER_MAX: usize = 16;

/// How often the outbox is looked at that others fill.
const POLL: Duration = Duration::from_secs(1);

/// Sends what is in the outbox.
pub struct Webhooks {
    options: WebhookOptions,
    agent: Agent,
}

impl Webhooks {
    /// A sender.
    pub fn new(options: WebhookOptions) -> Webhooks {
        // A redirect would lead past the list of hosts: it is a failure.
        let config = Config::builder()
            .timeout_global(Some(TIMEOUT))
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .proxy(None)
            .build();
        let resolver =
            PublicOnly { allow_private: options.allow_private, resolver: DefaultResolver::default() };
        let agent = Agent::with_parts(config, DefaultConnector::default(), resolver);
        Webhooks { options, agent }
    }

    /// Refuses an address that would never be called, when a job is submitted.
    pub fn check(&self, url: &str) -> Result<(), Failure> {
        let wrong = |rule: &str| Err(Failure::field(Code::WebhookRefused, "webhook", rule));
        let Ok(uri) = url.parse::<Uri>() else {
            return wrong("must be an address as https://hooks.example/done");
        };
        let (Some("http" | "https"), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
            return wrong("must be an address as https://hooks.example/done");
        };
        if authority.as_str().contains('@') {
            return wrong("must not hold a name or a password");
        }
        let host = authority.host();
        if !self.options.hosts.iter().any(|allowed| allowed.eq_ignore_ascii_case(host)) {
            return wrong("is not at a host that this server may call (--webhook-host)");
        }
        let literal: Option<IpAddr> = host.trim_matches(['[', ']']).parse().ok();
        if literal.is_some_and(is_private) && !self.options.allow_private {
            return wrong("is in a private network, which this server may not call");
        }
        Ok(())
    }

    /// Sends until `stop` says so. What is not sent then is sent by whoever comes next.
    pub async fn run(self, store: Store, mut stop: watch::Receiver<bool>) {
        let sender = Arc::new(self);
        let mut changes = store.changes();
        let mut under_way = JoinSet::new();
        while !*stop.borrow() {
            let pause = |attempt: i64| {
                let triplings = u32::try_from(attempt.clamp(1, ATTEMPTS_MAX) - 1).unwrap_or(0);
                // A try under way is not repeated before it is over.
                TIMEOUT + PAUSE * PAUSE_FACTOR.pow(triplings)
            };
            if under_way.len() >= TOGETHER_MAX {
                tokio::select! {
                    _ = stop.changed() => {}
                    _ = under_way.join_next() => {}
                }
                continue;
            }
            match store.next_delivery(pause).await {
                Ok(Some(delivery)) => {
                    let (sender, store) = (Arc::clone(&sender), store.clone());
                    under_way.spawn(async move { deliver(&sender, &store, delivery).await });
                }
                Ok(None) => {
                    tokio::select! {
                        _ = stop.changed() => {}
                        _ = changes.recv() => {}
                        Some(_) = under_way.join_next() => {}
                        () = tokio::time::sleep(POLL) => {}
                    }
                }
                Err(error) => {
                    tracing::error!(reason = error.to_string(), "cannot read the outbox");
                    tokio::time::sleep(POLL).await;
                }
            }
        }
        // What became of those under way is written, too.
        while under_way.join_next().await.is_some() {}
    }

    /// Sends one. Blocks.
    fn send(&self, delivery: &Delivery) -> Result<(), String> {
        // Hosts may have been taken off the list since.
        self.check(&delivery.url).map_err(|failure| failure.message)?;
        let sent_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let response = self
            .agent
            .post(&delivery.url)
            .header("content-type", "application/json")
            .header("x-fornax-delivery", &delivery.id)
            .header("x-fornax-timestamp", sent_s.to_string())
            .header(
                "x-fornax-signature",
                signature(&self.options.secret, sent_s, &delivery.id, &delivery.body),
            )
            .send(&delivery.body)
            .map_err(|error| error.to_string())?;
        match response.status().is_success() {
            true => Ok(()),
            false => Err(format!("status {}", response.status().as_u16())),
        }
    }
}

/// Sends one and writes what became of it. Returns whether it arrived.
pub async fn deliver(sender: &Arc<Webhooks>, store: &Store, delivery: Delivery) -> bool {
    let (sending, sent) = (Arc::clone(sender), delivery.clone());
    let sent = tokio::task::spawn_blocking(move || sending.send(&sent)).await;
    let sent = sent.unwrap_or_else(|_| Err("the sender panicked".to_owned()));
    let (job, attempt) = (&delivery.job_id, delivery.attempt);
    let arrived = sent.is_ok();
    let written = match sent {
        Ok(()) => store.end_delivery(&delivery, true).await,
        Err(reason) if attempt >= ATTEMPTS_MAX => {
            tracing::error!(job, attempt, reason, "a webhook is given up");
            store.end_delivery(&delivery, false).await
        }
        Err(reason) => {
            tracing::warn!(job, attempt, reason, "a webhook failed and is tried again");
            Ok(())
        }
    };
    if let Err(error) = written {
        tracing::error!(job, reason = error.to_string(), "cannot write what became of a webhook");
    }
    arrived
}

/// `sha256=` and, in hexadecimal, the HMAC-SHA256 of `TIMESTAMP.DELIVERY.BODY` under the shared secret. The time and the
/// delivery's id are signed with the body, so that a request that somebody recorded is no good later, nor a second
/// time.
pub fn signature(secret: &[u8], sent_s: u64, delivery: &str, body: &str) -> String {
    format!("sha256={}", hmac(secret, &format!("{sent_s}.{delivery}.{body}")))
}

fn hmac(secret: &[u8], text: &str) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("a key may have any length");
    mac.update(text.as_bytes());
    mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Finds addresses as usual and refuses those that a stranger must not have us call. A name is looked up once, and what
/// was looked at is what is called.
#[derive(Debug)]
struct PublicOnly {
    allow_private: bool,
    resolver: DefaultResolver,
}

impl Resolver for PublicOnly {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let found = self.resolver.resolve(uri, config, timeout)?;
        let mut allowed = self.empty();
        for address in found.iter().filter(|address| self.allow_private || !is_private(address.ip())) {
            allowed.push(*address);
        }
        match allowed.is_empty() {
            true => Err(ureq::Error::HostNotFound),
            false => Ok(allowed),
        }
    }
}

/// Whether an address is not one of the open internet.
fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_private_v4(address),
        IpAddr::V6(address) => is_private_v6(address),
    }
}

fn is_private_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_multicast()
        || address.is_documentation()
        // "This" network, shared by carriers, protocol assignments, benchmarks, reserved and broadcast.
        || a == 0
        || (a == 100 && (64..128).contains(&b))
        || (a, b, c) == (192, 0, 0)
        || (a == 198 && (b == 18 || b == 19))
        || a >= 240
}

fn is_private_v6(address: Ipv6Addr) -> bool {
    let parts = address.segments();
    let last = [parts[6], parts[7]].map(u16::to_be_bytes);
    let inner = Ipv4Addr::new(last[0][0], last[0][1], last[1][0], last[1][1]);
    address.is_loopback()
        || address.is_unspecified()
        || address.is_multicast()
        // Unique local, link local, site local, documentation.
        || (parts[0] & 0xfe00) == 0xfc00
        || (parts[0] & 0xffc0) == 0xfe80
        || (parts[0] & 0xffc0) == 0xfec0
        || (parts[0] == 0x2001 && parts[1] == 0xdb8)
        // Ways to write an address of version 4: mapped, compatible, translated, 6to4.
        || (parts[..5] == [0; 5] && (parts[5] == 0xffff || parts[5] == 0) && is_private_v4(inner))
        || (parts[..6] == [0x64, 0xff9b, 0, 0, 0, 0] && is_private_v4(inner))
        || (parts[0] == 0x2002 && {
            let [a, b] = parts[1].to_be_bytes();
            let [c, d] = parts[2].to_be_bytes();
            is_private_v4(Ipv4Addr::new(a, b, c, d))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_public_addresses_of_allowed_hosts_are_called() {
        let hosts = ["hooks.example", "127.0.0.1", "[::1]", "8.8.8.8"].map(str::to_owned).to_vec();
        let careful = Webhooks::new(WebhookOptions { hosts: hosts.clone(), ..WebhookOptions::default() });
        let check = |url: &str, passes: bool| assert_eq!(careful.check(url).is_ok(), passes, "{url}");
        check("https://hooks.example/done?x=1", true);
        check("http://HOOKS.example:8080", true);
        check("http://8.8.8.8/", true);
        for url in [
            "https://other.example/",
            "https://hooks.example.evil/",
            "https://user:pass@hooks.example/",
            "https://evil@hooks.example/",
            "ftp://hooks.example/",
            "hooks.example",
            "",
            "http://127.0.0.1/",
            "http://[::1]:80/",
            "http://0x7f000001/",
            "http://localhost/",
        ] {
            check(url, false);
        }
        let at_home = WebhookOptions { hosts, allow_private: true, ..WebhookOptions::default() };
        assert!(Webhooks::new(at_home).check("http://127.0.0.1:9/").is_ok());
    }

    #[test]
    fn private_addresses_are_known_however_they_are_written() {
        for address in [
            "0.0.0.0",
            "10.1.2.3",
            "100.64.0.1",
            "127.0.0.1",
            "169.254.169.254",
            "172.16.0.1",
            "192.168.1.1",
            "198.18.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:10.0.0.1",
            "::127.0.0.1",
            "64:ff9b::7f00:1",
            "2002:7f00:1::",
            "fc00::1",
            "fe80::1",
            "ff02::1",
            "2001:db8::1",
        ] {
            assert!(is_private(address.parse().unwrap()), "{address}");
        }
        for address in ["8.8.8.8", "93.184.216.34", "100.63.0.1", "2606:4700::1111", "::ffff:8.8.8.8"] {
            assert!(!is_private(address.parse().unwrap()), "{address}");
        }
    }

    /// The vector of RFC 4231, case 2.
    #[test]
    fn signatures_are_the_published_ones() {
        let wanted = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        assert_eq!(hmac(b"Jefe", "what do ya want for nothing?"), wanted);
    }
}
